"""hatchling's build hook: compiles the guard into the wheel.

The wheel is tagged for the platform when it carries the library, and is a plain one without the
guard where there is no compiler; umad then runs on the auditor alone and says so.
"""

import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class GuardHook(BuildHookInterface[Any]):
    """Builds the guard's libraries and adds them to the wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before the files are collected; ``version`` is "editable" or "standard"."""
        if self.target_name != "wheel" or not sys.platform.startswith("linux"):
            return
        sys.path.insert(0, str(Path(self.root)))
        try:
            from umad.errors import ConfigError
            from umad.guard import device, preload

            try:
                libraries = [preload.build(), device.build()]
            except ConfigError as error:
                self.app.display_warning(f"the wheel is built without the guard: {error}")
                return
        finally:
            sys.path.pop(0)
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        # git ignores them, so they have to be named; an editable install finds them beside their
        # sources.
        build_data["artifacts"] += [str(library.relative_to(self.root)) for library in libraries]
