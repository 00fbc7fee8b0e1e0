"""`python -m recipes.openpi`: every step from small data to a policy that is served."""

from recipes.command_line import make_app

# In the order in which they are run, each with its module and function.
COMMANDS = {
    "make-data": ("commands", "make_data"),
    "make-weights": ("commands", "make_weights"),
    "finetune": ("commands", "finetune"),
    "quantize": ("serving_commands", "quantize"),
    "serve": ("serving_commands", "serve"),
    "rollout": ("serving_commands", "rollout"),
    "compile": ("serving_commands", "compile_"),
}

app = make_app(
    "recipes.openpi", COMMANDS, "π0 and π0.5 on TPU: fine-tuning, quantization, serving."
)

if __name__ == "__main__":
    app(prog_name="python -m recipes.openpi")
