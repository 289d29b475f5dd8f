"""Everything that is for looking at: terminal text, pictures, pages.

Import the module you need: `batchwright.report.text` needs nothing, `figures` needs matplotlib.
"""

__all__: list[str] = []
