"""The GSM8K rule on free text: whole responses labelled by hand, and the solutions of the data set.

The responses were written for this test: worked steps, closing remarks, several numbers, money.
"""

import json
import re
from fractions import Fraction
from pathlib import Path

import pytest

from verl.rewards.rules import gsm8k

# (response, the final answer by a human reader)
RESPONSES = [
    # the answer is announced
    ("She sold 48 in April and half as many in May. 48 + 24 = 72. The answer is 72.", 72),
    ("The answer is 72. Let me know if you want to see the 2 steps in more detail!", 72),
    ("The answer is 72 clips, of which 24 were sold in May.", 72),
    ("Let x be the price.\nx + 5 = 12\nx = 7\n\nTherefore, the answer is $7.", 7),
    ("Answer: 15\nExplanation: 3 boxes of 5 pens each.", 15),
    ("**Answer:** 15 pens (3 boxes with 5 pens each)", 15),
    ("**Answer**: 15", 15),
    ("Answer:\n\n15", 15),
    ("Final Answer: The train needs 4 hours for the 320 miles.", 4),
    ("So my final answer is: 1,250 dollars. (That is 250 a week for 5 weeks.)", 1250),
    ("The answer is -4 degrees, 10 degrees below the 6 degrees of noon.", -4),
    ("The answer is $18.50, since 3 tickets cost $55.50.", Fraction(37, 2)),
    ("The correct answer would be 40 minutes, not 45.", 40),
    ("answer = 6", 6),
    ("The answer is 3 + 4 = 7.", 7),
    ("The answer is about 33.33, which rounds to 33.", 33),
    ("<think>12 * 4 = 48, minus 6</think><answer>42</answer>", 42),
    ("Each of the 6 friends gets 4 cookies. \\boxed{4} is the number of cookies for each of 6 friends.", 4),
    ("We get $\\boxed{1{,}200}$ for 12 months at 100 a month.", 1200),
    ("The number of eggs is \\( \\boxed{18} \\).", 18),
    # the marks of the data set, and what follows them
    ("5 * 200 = 1000\n#### 1,000", 1000),
    ("5 * 200 = 1000\n#### 1,000\nI hope that helps with your 5 tests.", 1000),
    ("#### $1,000.00\n\nCheck: 1000 / 5 = 200.", 1000),
    ("#### -12", -12),
    ("He has\n#### 12 apples left", 12),
    # the last sentence says it
    ("Tom has 3 bags with 4 marbles each. He has 3 * 4 = 12 marbles.", 12),
    ("First she buys 5 apples, then 7 more. In the end there are 12 apples.", 12),
    ("There were 15 trees and now there are 21, so 6 were planted.", 6),
    ("They planted 21 - 15 = 6 trees in 3 hours.", 6),
    ("Half of 60 is 30 and a third of 30 is 10. That leaves 20", 20),
    ("Olivia had 23 dollars. 5 bagels for 3 dollars each are 15 dollars. So she has $8 left.", 8),
    ("In total: 12 + 15 + 3 = 30 stickers for 3 children.", 30),
    ("He drove 60 miles an hour for 3 hours = 180 miles in all.", 180),
    ("So the total cost = $45 for 9 people", 45),
    ("Thus she spent 2 * 7.50 = $15.00 on 2 books.", 15),
    ("The shop earns 20 * 8 = $160 on Monday, twice that on Tuesday, which means $320.", 320),
    ("x = 5 and y = 3, so together they have 8 apples", 8),
    ("We know that 4x = 20, hence x = 5.", 5),
    ("Mia is 4 + 8 = 12 years old in 8 years.", 12),
    ("It takes 459 / 51 = 9 minutes to blink 459 times.", 9),
    ("He can skip 4 classes because 10 - 6 leaves that many", 4),
    ("Sam wins because 12 > 9, so he gets 3 points more.", 3),
    ("The winner jumped 22 feet because 22 > 21", 22),
    ("100/3 = 33.33 which rounds up to 34 buses", 34),
    ("66.67% rounded to the next whole number is 67%", 67),
    ("that is ≈ 14 boxes for 100 eggs", 14),
    # layout of models
    ("**Step 1:** 48 / 2 = 24\n**Step 2:** 48 + 24 = 72\n\nNatalia sold **72** clips in 2 months.", 72),
    ("1. Eggs laid: 16\n2. Eggs eaten: 3 + 4 = 7\n3. Eggs sold: 16 - 7 = 9\n4. Money: 9 * $2 = **$18** a day", 18),
    ("- April: 48\n- May: 24\n- Total: 72", 72),
    ("| month | clips |\n| April | 48 |\n| May | 24 |\nTotal clips: **72 clips** for 48 + 24 customers.", 72),
    ("Janet makes **$18** every day at the farmers' market.", 18),
    ("$$48 + 24 = 72$$", 72),
    ("\\[ 9 \\times 2 = 18 \\] dollars", 18),
    ("The profit is\n$70{,}000", 70000),
    ("16 - 3 - 4 = 9\n9 x 2 = 18", 18),
    ("Weekly total: 3 sprints x 3 times x 60 m = 540 m!", 540),
    # money, decimals, negative numbers, units
    ("It costs $1,234.50.", Fraction(2469, 2)),
    ("He ends with a loss: 20 - 35 = -15", -15),
    ("After 3 weeks his balance is $80 - $200.50 = -$120.50.", Fraction(-241, 2)),
    ("The temperature is \u22127 degrees.", -7),
    ("She drinks 0.5 + 0.25 = .75 litres", Fraction(3, 4)),
    ("They ate 3/8 of the pizza.", Fraction(3, 8)),
    ("The recipe needs 1 1/2 cups", Fraction(3, 2)),
    ("That is €2.500,00, no: it is €2,500.", 2500),
    ("It weighs 12 500 grams", 12500),
    ("The discount is 25%.", 25),
    ("He earns £30 = £30.00", 30),
    ("It is 7 pm.", 7),
    ("The 3rd runner needs 61.5 seconds.", Fraction(123, 2)),
    ("The cost is 80,000 + 50,000 = 130,000 dollars", 130000),
    # nothing is said
    ("I cannot solve this.", None),
    ("Half of them are left.", None),
]
# Known disagreements: (response, final answer by a reader, by the rule).
BEYOND = [
    ("Natalia sold 72 clips. I hope this helps with your 2 questions.", 72, 2),
    ("It would take 15 hours to clean 45 rooms.", 15, 45),
    ("The answer is not 5 but 6.", 6, 5),
    ("Since x = 5 and y = 3, the sum is 8.", 8, 3),
    ("Seventy-two clips were sold.", 72, None),
]
DATA = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k"


@pytest.mark.parametrize("text, number", RESPONSES)
def test_the_rule_agrees_with_the_reader(text, number):
    assert gsm8k.extract(text, "flexible") == number
    if number is not None:
        for truth, score in ((number, 1.0), (number + 1, 0.0)):
            found = gsm8k.gsm8k_flexible("openai/gsm8k", text, str(truth))
            assert (found["score"], found["acc"]) == (score, score)


@pytest.mark.parametrize("text, reader, rule", BEYOND)
def test_what_a_reader_understands_beyond_the_rule(text, reader, rule):
    """Documents the limits of the rule."""
    assert gsm8k.extract(text, "flexible") == rule != reader


@pytest.mark.parametrize("split, rows, agreement", [("test", 1319, 0.993), ("train", 7473, 0.993)])
def test_solutions_that_people_wrote(split, rows, agreement):
    """Solutions without the line `####`. Most of those that differ are errors in the data, such as $0.25 for 25."""
    if not DATA.is_dir():
        pytest.skip("GSM8K is not here")
    solutions = [json.loads(line)["answer"] for line in (DATA / f"{split}.jsonl").read_text().splitlines()]
    assert len(solutions) == rows
    parts = [solution.partition("####") for solution in solutions]
    for notes in ("", "<<.*?>>"):  # removed: nothing, the calculator annotations
        texts = [re.sub(notes, "", words).strip() for words, _, _ in parts]
        found = [gsm8k.extract(text, "flexible") for text in texts]
        assert sum(a == gsm8k.parse_number(n.strip()) for a, (_, _, n) in zip(found, parts)) / rows > agreement
