"""From a torch call to a jaxpr. Start reading in README.md."""
