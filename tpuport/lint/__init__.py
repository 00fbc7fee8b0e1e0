"""From paths to a report: which files, what is found in them, what of it is shown, and how."""
