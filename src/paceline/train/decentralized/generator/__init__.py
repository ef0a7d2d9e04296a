"""The group generator as a network service, and the workers' client. Nothing here needs torch.

``messages.py`` has what is said, ``wire.py`` how bytes are framed and authenticated, ``job.py`` what the service does
with a message (no network, no clock), ``averages.py`` the averages of all workers, ``service.py`` the sockets, and
``client.py`` with ``connecting.py`` the worker's side. ``secret.py`` reads the file with the job's secret.
"""

from __future__ import annotations

from paceline.train.decentralized.generator.client import GeneratorClient
from paceline.train.decentralized.generator.service import GeneratorService

__all__ = ["GeneratorClient", "GeneratorService"]
