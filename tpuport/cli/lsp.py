"""`tpuport lsp`: findings of lint in an editor, by the Language Server Protocol."""

from tpuport.cli._common import errors_as_exit_codes


def lsp() -> None:
    """Serve findings, fixes and pages of rules to an editor on standard input and output.

    Needs neither torch nor jax, and runs no code of the files.
    """
    with errors_as_exit_codes("tpuport lsp"):
        from tpuport.servers.language_server import server

        server().start_io()
