"""The machine and its processes: GPUs, log lines, environment variables, exit codes."""
