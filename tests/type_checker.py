"""How annotations are checked in tests: as mypy reads them, an int is welcome where a float is asked for."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
