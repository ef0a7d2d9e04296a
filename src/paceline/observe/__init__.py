"""What is seen while a job runs: what links can do (``links``)."""
