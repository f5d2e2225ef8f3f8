"""Models on disk: what a folder or file is, its configuration, its versions and their contents."""
