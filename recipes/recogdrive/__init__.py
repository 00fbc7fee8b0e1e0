"""ReCogDrive on TPU: the chat model, its cached hidden states, the planner, and its reinforcement.

`python -m recipes.recogdrive --help` lists the steps; README.md walks through them.
"""
