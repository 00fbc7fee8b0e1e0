"""A repository of somebody else's: what starts it, what is left to do, and whether it was right."""
