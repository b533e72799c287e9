"""attention_ext in libraries of models; each module needs its library, and none is imported here."""

__all__ = ["check_tested"]


def check_tested(library: str, version: str, tested: str) -> None:
    """Refuses a version of a library that the tests do not run with: what is called there is not fixed from minor to minor."""
    if version.split(".")[:2] != tested.split(".")[:2]:
        raise ImportError(
            f"attention_ext.integrations.{library} is tested with {library} {tested} and this is {version}: "
            f"pip install '{library}=={tested}.*', or use attention_ext.override(), which depends on no version of it."
        )
