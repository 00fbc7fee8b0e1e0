"""HTML, JSON and files that reports share."""
