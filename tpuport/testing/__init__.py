"""For authors of rules: whether rewritten code does the same, eagerly and as a program."""
