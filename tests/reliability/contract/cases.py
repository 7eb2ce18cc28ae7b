"""All cases: those with numbers, which run on a device too, and those of objects on the host."""

from contract import (
    cases_attend,
    cases_index,
    cases_layers,
    cases_objects,
    cases_plans,
    cases_rotate,
    cases_rows,
    cases_select,
)

NUMERIC = (*cases_rows.CASES, *cases_attend.CASES, *cases_index.CASES, *cases_select.CASES, *cases_rotate.CASES)
ALL = (*NUMERIC, *cases_objects.CASES, *cases_plans.CASES, *cases_layers.CASES)
