"""Training steps from the configuration that a script has for another framework's loop."""
