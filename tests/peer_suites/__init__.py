"""The peers' own test suites, run nearly unmodified against a gateway: ``make peer-suites``.

A suite is one module: where its tests are, the commit they are pinned to, which gateway each of
them is run against, and reasons for those that do not apply. ``SUITES`` in ``__main__`` lists them.
"""
