"""The version of memfit: read by the package, the command line, the plan cache and the build."""

__version__ = "0.1.0"
