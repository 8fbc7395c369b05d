"""The `longspan` command: one file per verb. torch is imported inside the verbs, so that help answers at once."""
