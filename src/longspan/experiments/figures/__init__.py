"""The figures of Dai et al. 2019 for any model, and those of the README."""
