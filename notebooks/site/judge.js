// What a page says to a guess without waiting for Python: the same as controls.judged (test_site compares them).
const digits = (value) => {
  const decimals = value ? Math.max(0, 2 - Number(Math.abs(value).toExponential(6).split("e")[1])) : 0;
  return value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
};
const plain = (value) => Number.isInteger(value) ? value.toLocaleString("en") : digits(value);

const numberIn = (text, unit) => {
  let bare = text.trim();
  for (const end of [unit, "%"]) if (end && bare.endsWith(end)) bare = bare.slice(0, -end.length).trim();
  if (/^[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?$/.test(bare)) bare = bare.replaceAll(",", "");
  else if (bare.split(",").length === 2 && !bare.includes(".")) bare = bare.replace(",", ".");
  return /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(bare) && Number.isFinite(Number(bare)) ? Number(bare) : null;
};

const howFar = (guess, right) => {
  if (Math.abs(guess - right) <= 0.02 * Math.abs(right)) return "you have it";
  if (guess * right <= 0) return "not close";
  const factor = Math.max(guess / right, right / guess);
  const times = factor >= 1.5 ? `${digits(factor)} times` : `${Math.round(100 * (factor - 1))}%`;
  return `${times} too ${Math.abs(guess) > Math.abs(right) ? "high" : "low"}`;
};

// answer: number, and the reply to "show me", which begins "It is 12 GiB."
export const judged = (text, unit, { number, reply }) => {
  const guess = numberIn(text, unit);
  if (guess === null) return { refused: true, reply: `✗ ${text.trim() || "An empty field"} is not a number: write it like 1.5 or 1,500` };
  const [is, ...because] = reply.split("\n");
  const said = `You said ${plain(guess)}${unit && unit !== "%" ? " " : ""}${unit}.`;
  return { guess, refused: false, reply: [`${said} ${is.slice(0, -1)}: ${howFar(guess, number)}.`, ...because].join("\n") };
};

// The line of a guess in its figure, as Drawing.marked draws it.
export const guessLine = (guess, { axis, start, per, unit, shape }, layout) => {
  const along = axis[0], range = layout[`${along}axis${axis.slice(1)}`]?.range;
  const at = (start + per * guess) / unit;
  const inside = range ? Math.min(Math.max(at, range[0]), range[1]) : at;
  return { ...shape, [`${along}0`]: inside, [`${along}1`]: inside };
};
