"""`python -m recipes.mae_dit`: data, stage 1, statistics of latents, reconstructions."""

from recipes.command_line import make_app

# In the order in which they are run, each with its module and function.
COMMANDS = {
    "make-data": ("commands", "make_data"),
    "stage1": ("commands", "stage1"),
    "stats": ("commands", "stats"),
    "cache": ("commands", "cache"),
    "stage2": ("commands", "stage2"),
    "sample": ("commands", "sample"),
    "evaluate": ("commands", "evaluate"),
    "reconstruct": ("commands", "reconstruct"),
    "page": ("commands", "page"),
    "compile": ("commands", "compile_"),
}

app = make_app(
    "recipes.mae_dit",
    COMMANDS,
    "MAE-DiT on TPU: an image autoencoder with a discriminator, by upstream's configurations.",
)

if __name__ == "__main__":
    app(prog_name="python -m recipes.mae_dit")
