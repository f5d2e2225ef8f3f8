"""Files for other systems: Kubernetes, KServe, Helm, Ray."""
