"""Branches and loops on traced values as `lax.cond` and `lax.while_loop`."""
