"""The dtypes that a program computes in: a policy, its application, and an audit of the result."""
