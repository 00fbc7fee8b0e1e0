"""`python -m recipes.hunyuan_video`: from a prompt to an mp4 file, stage by stage."""

from recipes.command_line import make_app

COMMANDS = {
    "make-weights": ("commands", "make_weights"),
    "generate": ("commands", "generate"),
    "encode": ("commands", "encode"),
    "denoise": ("commands", "denoise"),
    "upscale": ("commands", "upscale"),
    "decode": ("commands", "decode"),
    "denoise-latents": ("commands", "denoise_latents"),
    "compare": ("commands", "compare"),
    "compile": ("commands", "compile_"),
}

app = make_app(
    "recipes.hunyuan_video", COMMANDS, "HunyuanVideo-1.5 on TPU: text or an image to mp4."
)

if __name__ == "__main__":
    app(prog_name="python -m recipes.hunyuan_video")
