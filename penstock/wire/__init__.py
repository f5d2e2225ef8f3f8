"""Encoding and decoding of requests and answers. Pure: no sockets, no clock, no threads."""
