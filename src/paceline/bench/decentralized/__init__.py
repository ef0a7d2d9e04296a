"""Trains a real model to a target loss, with DDP and with every scheme of ``paceline.Decentralized``, side by side.

``task.py`` is what is learnt and how computation is padded; ``cases.py`` what can be asked for; ``board.py`` how ranks
and controller see each other's progress; ``rank.py`` one rank; ``run.py`` the controller; ``results.py`` the figures;
``report.py`` the tables and the picture.
"""
