"""Dates in words: what a text or a query says about time, as intervals of days (temporal cues, paper Eq. 6).

Days are proleptic ordinals (`date.toordinal`), so that matching two mentions is comparing numbers.
Relative expressions count calendar days from the reference's own date in its own zone: no clock
arithmetic, so a change to summer time moves nothing.

The readings are English and ours: weeks run from Monday to Sunday; a season is its three calendar
months in the north, and a winter belongs to the year it begins in; 05/07/2023 is month first as in
the United States (day first when the first number is above 12, or with dots: 05.07.2023); a month or
a day without its year is the one nearest to the reference, and nothing without a reference.
"""

from zeromem_torch.substrate.dates.mentions import DateMention, find_dates

__all__ = ["DateMention", "find_dates"]
