"""How anything is measured: when to send, what to send, to whom; then statistics and reports."""
