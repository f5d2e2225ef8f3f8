"""The server's own pages: start page, description of the API, and the state that they show."""
