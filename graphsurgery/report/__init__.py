"""The report of a rewrite: what was done at every site, why, and with which evidence."""
