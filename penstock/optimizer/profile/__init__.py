"""Where the milliseconds go, and what the hardware would allow."""
