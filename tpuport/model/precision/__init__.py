"""The dtypes that a program computes in: a policy, how it is in force, what became of it."""
