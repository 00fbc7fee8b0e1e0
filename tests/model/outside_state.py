"""A module of Python whose attributes tests change: what blocks read of it is theirs no more."""

scale = 1.0
