"""Chats of few tokens."""

# Beside 1000: eager attention over those takes most of a test's time.
LENGTH = 56
