"""What a program read from outside, and whether it has changed."""
