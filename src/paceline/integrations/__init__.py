"""``paceline.DataParallel`` under training frameworks. Import the submodule of the framework you have installed."""
