"""The version of tpuport: that of the tag it was built from."""

import importlib.metadata

try:
    __version__ = importlib.metadata.version("tpuport")
except importlib.metadata.PackageNotFoundError:  # a folder on the path, without an installation
    __version__ = "0+unknown"
