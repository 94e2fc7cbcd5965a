from smoke.record import QuantizerRow


def known_rows(role, spec):
    return [QuantizerRow(case=role, elements=1, mismatches=0)]
