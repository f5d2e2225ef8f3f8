"""Profile a model: where its time goes, and what the hardware would allow."""
