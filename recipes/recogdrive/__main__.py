"""`python -m recipes.recogdrive`: every step from small data to a reinforced planner."""

from recipes.command_line import make_app

# In the order in which they are run, each with its module and function.
COMMANDS = {
    "make-data": ("commands", "make_data"),
    "finetune": ("chat_commands", "finetune"),
    "cache": ("chat_commands", "cache"),
    "train": ("commands", "train"),
    "grpo": ("commands", "grpo"),
    "sample": ("commands", "sample"),
    "compile": ("commands", "compile_"),
}

app = make_app(
    "recipes.recogdrive",
    COMMANDS,
    "ReCogDrive on TPU: chat model, cached hidden states, planner, reinforcement.",
)

if __name__ == "__main__":
    app(prog_name="python -m recipes.recogdrive")
