"""`python -m tpuport`: the `tpuport` command."""

from tpuport.cli.app import app

if __name__ == "__main__":
    app(prog_name="tpuport")
