"""A version that was not tested gives a message, not a wrong loss."""

from importlib.metadata import PackageNotFoundError, version


def check_version(package: str, tested: str) -> None:
    """Raise ImportError unless the installed version of a package begins with `tested`, such as `1.16.`."""
    try:
        found = version(package)
    except PackageNotFoundError:
        raise ImportError(
            f"tepo.integrations.{package} needs {package} {tested}x: pip install 'tepo[{package}]'"
        ) from None
    if not found.startswith(tested):
        raise ImportError(
            f"tepo.integrations.{package} was tested with {package} {tested}x and reaches into it; installed is "
            f"{found}: pip install 'tepo[{package}]'"
        )
