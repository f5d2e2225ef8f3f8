"""Bytes to requests and back. Pure: no sockets, no clock, no threads."""
