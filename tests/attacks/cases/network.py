from tests.attacks.case import Case

CASES: list[Case] = []
