"""`python -m recipes.openpilot`: from logs of drives and a model file to a fine-tuned one."""

from recipes.command_line import make_app

COMMANDS = {
    "make-data": ("commands", "make_data"),
    "pretrain": ("commands", "pretrain"),
    "prepare": ("commands", "prepare"),
    "label": ("commands", "label"),
    "train": ("commands", "train"),
    "evaluate": ("commands", "evaluate"),
    "export": ("commands", "export"),
    "compile": ("commands", "compile_"),
}

app = make_app(
    "recipes.openpilot",
    COMMANDS,
    "Fine-tune openpilot's driving models on TPU, by DoRA, on real logs. For research only: nothing"
    " that comes of it is fit to drive a car.",
)

if __name__ == "__main__":
    app(prog_name="python -m recipes.openpilot")
