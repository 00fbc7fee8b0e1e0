"""π0 and π0.5 on TPU: fine-tuning, quantization, and a server of policies.

`python -m recipes.openpi --help` lists the steps; README.md walks through them.
"""
