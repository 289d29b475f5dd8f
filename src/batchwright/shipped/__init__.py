"""Files that travel with the package: the text set of the demo."""
