"""The port report: records, text, HTML."""
