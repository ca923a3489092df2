"""A table of cases within one test."""

import functools
import inspect


def each_case(names, cases):
    """Run a test for each of the cases, as subtests that fail by themselves.

    As `pytest.mark.parametrize`, but the cases share the fixtures of one test, except for a folder
    in `tmp_path`: for tables of inputs and answers.
    """
    names = names.replace(" ", "").split(",") if isinstance(names, str) else names

    def decorated(test):
        signature = inspect.signature(test)

        @functools.wraps(test)
        def run(subtests, **fixtures):
            folder = fixtures.get("tmp_path")
            for number, case in enumerate(cases):
                if folder is not None:
                    fixtures["tmp_path"] = folder / str(number)
                    fixtures["tmp_path"].mkdir()
                values = dict(zip(names, case if len(names) > 1 else [case], strict=True))
                with subtests.test(**values):
                    test(**fixtures, **values)

        fixtures = [its for its in signature.parameters.values() if its.name not in names]
        subtests = inspect.Parameter("subtests", inspect.Parameter.KEYWORD_ONLY)
        run.__signature__ = signature.replace(parameters=[*fixtures, subtests])
        return run

    return decorated
