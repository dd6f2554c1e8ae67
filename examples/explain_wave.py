"""The last wave: why equal splits leave a GPU half empty, and equal tiles do not. Needs neither torch nor a GPU.

17 requests of 8,192 tokens over 8 KV heads on the 132 SMs of an H200, one worker an SM. Without splits there are 136
items of work: 132 workers take one each, and four take a second one while 128 wait.
"""

import wavefill

LENGTHS = [8192] * 17
SHAPE = {"HQ": 32, "KH": 8, "D": 128, "device": "H200", "workers": 132}


def show(schedule: wavefill.Fixed | wavefill.StreamK | str) -> wavefill.Choice:
    choice = wavefill.explain(LENGTHS, schedule=schedule, **SHAPE)
    print(f"{choice.label:<34} {choice.segments:>5} pieces  {choice.waves:>2} waves  "
          f"{choice.makespan:>4} tiles long  {choice.fill:>6.1%} filled  {choice.partials:>5} states to merge")
    return choice


whole = show(wavefill.Fixed(splits=1))
fixed = show("fixed")
flash = show(wavefill.Fixed(rule="flashdecoding"))
lean = show(wavefill.StreamK())
auto = show("auto")
print(f"\nauto: {auto.reason}")

assert whole.fill < 0.55, "four of 132 workers take a second item"
assert lean.fill > 0.99, "any two workers' shares differ by one tile at most"
assert lean.makespan <= min(fixed.makespan, flash.makespan)
