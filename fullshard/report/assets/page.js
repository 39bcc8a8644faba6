
"use strict";
/* The curves of the page: uPlot draws, this file chooses what. Texts of a run reach the page as text only. */
(() => {
  const root = document.documentElement;
  const find = (selector) => document.querySelector(selector);
  const state = { smooth: 0, log: false, axis: "step", band: true, range: null };
  const plots = [];
  let data = read(document);

  function read(from) {
    return JSON.parse(from.getElementById("data").textContent);
  }

  /* Numbers for people. */
  function compact(value) {
    const size = Math.abs(value);
    for (const [scale, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]]) {
      if (size >= scale) return `${+(value / (unit === "k" ? 1e3 : scale)).toPrecision(4)}${unit}`;
    }
    if (size !== 0 && size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
    return String(+value.toPrecision(5));
  }
  function duration(seconds) {
    const s = Math.round(seconds);
    if (s < 120) return `${+seconds.toPrecision(3)} s`;
    const h = Math.floor(s / 3600), m = Math.floor((s % 3600) / 60);
    return h ? `${h}:${String(m).padStart(2, "0")} h` : `${m}:${String(s % 60).padStart(2, "0")} min`;
  }
  function shown(value, unit) {
    if (value === null || value === undefined) return "–";
    return unit === "%" ? `${+(value * 100).toPrecision(4)} %` : compact(value);
  }
  const onAxis = (value) => (state.axis === "seconds" ? duration(value) : compact(value));
  const axisName = () => ({ step: "step", seconds: "time", tokens: "tokens" })[state.axis];

  /* Where the x axis may have labels: at whole steps and tokens; at seconds, minutes and hours that are round. */
  const WHOLE = Array.from({ length: 14 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();
  const ROUND = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30,
    ...[1, 2, 5, 10, 20, 30].map((minutes) => minutes * 60),
    ...[1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].map((hours) => hours * 3600)];

  /* Colours: of the series for one run, of the run for several. */
  const style = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  function colour(run, place) {
    return style(`--run-${(data.runs.length > 1 ? run : place) % 8}`);
  }
  function faint(colour, share) {
    return `color-mix(in srgb, ${colour} ${share}%, transparent)`;
  }

  /* The mean with weights that fall off, corrected for its beginning. */
  function smoothed(values, weight) {
    let sum = 0, mass = 0;
    return values.map((value) => {
      if (value === null || value === undefined) return value;
      sum = sum * weight + value * (1 - weight);
      mass = mass * weight + 1 - weight;
      return sum / mass;
    });
  }

  /* Every curve of a chart: which run, its name, x and y. */
  function lines(chart) {
    const found = [];
    data.runs.forEach((run, number) => {
      Object.entries(chart.series).forEach(([name, label], place) => {
        const series = run.series[name];
        if (!series) return;
        const kind = name.split("/")[0];
        const several = Object.keys(chart.series).length > 1;
        const words = data.runs.length > 1 ? run.label + (several ? `, ${label}` : "") : label;
        const keep = run[kind][state.axis].map((x) => x !== null);
        const pick = (values) => values && values.filter((_, at) => keep[at]).map(
          (value) => (state.log && value !== null && value <= 0 ? null : value));
        found.push({
          name: words, kind, run: number, place, colour: colour(number, place),
          x: run[kind][state.axis].filter((x) => x !== null),
          mean: pick(series.mean), low: pick(series.low), high: pick(series.high),
        });
      });
    });
    return found.filter((line) => line.x.length);
  }

  function extent() {
    const all = data.runs.flatMap((run) => [...run.train[state.axis], ...run.validation[state.axis]]);
    const known = all.filter((x) => x !== null);
    const low = known.length ? known.reduce((a, b) => Math.min(a, b)) : 0;
    const high = known.length ? known.reduce((a, b) => Math.max(a, b)) : 1;
    return low < high ? [low, high] : [low - 1, high + 1];
  }

  /* One uPlot series for each column of a line; `main` is the one that is read out, which is never smoothed. */
  function columns(line, exact, few) {
    const several = data.runs.length > 1;
    const width = 1.8, dash = several && line.place ? [6, 4] : undefined;
    const points = { show: line.kind === "validation" ? line.x.length <= 200 : few, size: 6,
      stroke: line.colour, fill: line.colour };
    const smooth = state.smooth > 0 && line.kind === "train" && !exact;
    const main = { label: line.name, stroke: line.colour, width, dash, points };
    const parts = [];
    if (line.low && state.band) {
      const edge = { stroke: "transparent", width: 0, points: { show: false } };
      parts.push({ values: line.high, series: edge }, { values: line.low, series: edge, closes: true });
    }
    if (smooth) {
      parts.push({ values: line.mean, series: { stroke: faint(line.colour, 30), width: 1, points: { show: false } }, main: true });
      parts.push({ values: smoothed(line.mean, state.smooth), series: { ...main, points: { show: false } } });
    } else {
      parts.push({ values: line.mean, series: main, main: true });
    }
    return parts;
  }

  function draw() {
    while (plots.length) plots.pop().plot.destroy();
    const range = state.range || extent();
    document.querySelectorAll(".chart").forEach((figure, number) => {
      const chart = data.charts[number];
      if (chart) plots.push(drawn(figure, chart, range));
    });
  }

  function drawn(figure, chart, range) {
    const place = figure.querySelector(".plot");
    const found = lines(chart), few = found.every((line) => line.x.length <= 40);
    const series = [{}], bands = [], tables = [], mains = [];
    for (const line of found) {
      const table = [line.x];
      for (const part of columns(line, chart.exact, few)) {
        table.push(part.values);
        series.push(part.series);
        if (part.closes) {
          bands.push({ series: [series.length - 2, series.length - 1], fill: faint(line.colour, 22) });
        }
        if (part.main) mains.push(series.length - 1);
      }
      tables.push(table);
    }
    const held = { chart, figure, found, mains };
    held.plot = new uPlot({
      width: Math.max(place.clientWidth, 200),
      height: figure.classList.contains("first") ? 290 : 190,
      legend: { show: false },
      cursor: {
        sync: { key: "report" },
        drag: { x: true, y: false, setScale: false },
        points: { size: 7 },
        bind: { dblclick: () => () => zoom(null) },
      },
      scales: { x: { time: false, range: () => state.range || extent() }, y: { distr: state.log ? 3 : 1 } },
      axes: [axis({ values: (_, ticks) => ticks.map(onAxis), space: 55, size: 30,
        incrs: () => (state.axis === "seconds" ? ROUND : WHOLE) }),
        axis({ values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : shown(tick, chart.unit))), size: 58 })],
      series, bands,
      hooks: { setCursor: [() => readOut(held)], setSelect: [select], drawClear: [marks] },
    }, uPlot.join(tables), place);
    held.plot.setScale("x", { min: range[0], max: range[1] });
    describe(held);
    readOut(held);
    return held;
  }

  function axis(more) {
    const font = "11px system-ui, sans-serif", grid = { stroke: style("--grid"), width: 1 };
    return { stroke: style("--soft"), font, grid, ticks: { ...grid, size: 4 }, gap: 4, ...more };
  }

  /* Steps at which something happened, as thin lines. */
  function marks(plot) {
    if (state.axis !== "step") return;
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = faint(style("--bad"), 55);
    ctx.setLineDash([3, 3]);
    for (const mark of data.runs.flatMap((run) => run.marks)) {
      const x = plot.valToPos(mark.step, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  function select(plot) {
    const { left, width } = plot.select;
    if (width > 4) zoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }

  function zoom(range, from) {
    state.range = range;
    const [min, max] = range || extent();
    for (const { plot } of plots) plot.setScale("x", { min, max });
    document.querySelectorAll("[data-from]").forEach((button) => {
      button.setAttribute("aria-pressed", String(range ? button.dataset.from === from : button.dataset.from === "0"));
    });
  }

  /* The values under the cursor, or the last ones. */
  function readOut({ plot, chart, figure, found, mains }) {
    if (!plot) return;
    const at = plot.cursor.idx, out = figure.querySelector(".readout");
    const parts = [];
    if (at !== null && at !== undefined) parts.push(text(`${axisName()} ${onAxis(plot.data[0][at])}`));
    found.forEach((line, number) => {
      const values = plot.data[mains[number]];
      let near = at === null || at === undefined ? values.length - 1 : at;
      while (near > 0 && (values[near] === null || values[near] === undefined)) near -= 1;
      const part = text("");
      const swatch = document.createElement("i");
      swatch.className = `swatch line-${number % 8}`;
      swatch.style.background = line.colour;
      const value = document.createElement("b");
      value.textContent = shown(values[near], chart.unit);
      part.append(swatch, `${line.name} `, value);
      parts.push(part);
    });
    out.replaceChildren(...parts);
  }
  function text(words) {
    const span = document.createElement("span");
    span.textContent = words;
    return span;
  }

  /* For those who do not see the picture: a sentence for each curve, and all numbers as a table. */
  function describe({ chart, figure, found, plot }) {
    const said = found.map((line) => {
      const known = line.mean.map((y, at) => [y, line.x[at]]).filter(([y]) => y !== null);
      if (!known.length) return `${line.name}: no value`;
      const low = known.reduce((a, b) => (b[0] < a[0] ? b : a)), high = known.reduce((a, b) => (b[0] > a[0] ? b : a));
      const say = ([y, x]) => `${shown(y, chart.unit)} at ${axisName()} ${onAxis(x)}`;
      return `${line.name}: from ${say(known[0])} to ${say(known[known.length - 1])}, lowest ${say(low)}, highest ${say(high)}`;
    });
    figure.querySelector(".plot").setAttribute("aria-label", `${chart.title}. ${said.join(". ")}. Arrow keys read values.`);
    const missing = Object.keys(chart.series).flatMap((name) => data.runs.flatMap((run) => {
      const bad = run.not_finite[name];
      if (!bad) return [];
      const more = bad.count > bad.steps.length ? " …" : "";
      return [`${data.runs.length > 1 ? `${run.label}: ` : ""}NaN or Inf at step ${bad.steps.join(", ")}${more}`];
    }));
    figure.querySelector(".missing").textContent = [...new Set(missing)].join("; ");
    const numbers = figure.querySelector(".numbers");
    numbers.ontoggle = () => numbers.open && tabulate(numbers.querySelector(".scroll"), chart, found, plot);
    if (numbers.open) numbers.ontoggle();
  }

  function tabulate(place, chart, found, plot) {
    const table = document.createElement("table"), head = table.createTHead().insertRow(), body = table.createTBody();
    const heads = [axisName()];
    for (const line of found) heads.push(line.name, ...(line.low ? ["lowest", "highest"] : []));
    for (const words of heads) {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.className = "number";
      cell.textContent = words;
      head.append(cell);
    }
    const columns = uPlot.join(found.map((line) => [line.x, line.mean, ...(line.low ? [line.low, line.high] : [])]));
    const { min, max } = plot.scales.x;
    columns[0].forEach((x, at) => {
      if (x < min || x > max) return;
      const row = body.insertRow();
      columns.forEach((values, number) => {
        const cell = row.insertCell();
        cell.className = "number";
        cell.textContent = number ? (values[at] ?? "") : state.axis === "seconds" ? duration(x) : x.toLocaleString("en");
      });
    });
    place.replaceChildren(table);
  }

  /* Keyboard: along a curve, and in and out. */
  function onKey(event) {
    const held = plots.find(({ figure }) => figure.contains(event.currentTarget));
    if (!held) return;
    const { plot, figure } = held, x = plot.data[0];
    const [min, max] = [plot.scales.x.min, plot.scales.x.max];
    const inside = x.map((value, at) => [value, at]).filter(([value]) => value >= min && value <= max).map(([, at]) => at);
    if (!inside.length) return;
    const now = plot.cursor.idx ?? inside[inside.length - 1];
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -1e9, End: 1e9 }[event.key];
    if (move !== undefined) {
      const to = Math.min(Math.max(now + move * (event.shiftKey ? 10 : 1), inside[0]), inside[inside.length - 1]);
      figure.querySelector(".readout").setAttribute("aria-live", "polite");
      plot.setCursor({ left: plot.valToPos(x[to], "x"), top: plot.over.clientHeight / 2 });
    } else if (event.key === "+" || event.key === "=" || event.key === "-") {
      const half = ((max - min) / 2) * (event.key === "-" ? 2 : 0.5), middle = x[now];
      const [low, high] = extent();
      const wide = [Math.max(middle - half, low), Math.min(middle + half, high)];
      zoom(wide[0] <= low && wide[1] >= high ? null : wide);
    } else if (event.key === "0" || event.key === "Escape") {
      zoom(null);
    } else {
      return;
    }
    event.preventDefault();
  }

  /* Controls. */
  function onInput(id, change) {
    const input = document.getElementById(id);
    if (input) input.addEventListener("input", () => { change(input); draw(); });
  }
  onInput("smooth", (input) => { state.smooth = +input.value; find("#smoothed").value = input.value; });
  onInput("log", (input) => { state.log = input.checked; });
  onInput("band", (input) => { state.band = input.checked; });
  onInput("axis", (input) => { state.axis = input.value; state.range = null; zoom(null); });
  document.querySelectorAll("[data-from]").forEach((button) => button.addEventListener("click", () => {
    const [low, high] = extent(), from = button.dataset.from;
    zoom(from === "0" ? null : [low + (high - low) * +from, high], from);
  }));
  document.querySelectorAll(".plot").forEach((plot) => plot.addEventListener("keydown", onKey));
  find("form.tools")?.addEventListener("submit", (event) => event.preventDefault());

  /* Light and dark, on the screen and on paper. */
  find("#theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    draw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  const closed = new Set();
  function printing(on) {
    if (on === root.hasAttribute("data-printing")) return;
    root.toggleAttribute("data-printing", on);
    for (const part of document.querySelectorAll("details:not(.numbers)")) {
      if (on && !part.open) closed.add(part);
      part.open = on || !closed.has(part);
    }
    if (!on) closed.clear();
    draw();
  }
  addEventListener("beforeprint", () => printing(true));
  addEventListener("afterprint", () => printing(false));
  matchMedia("print").addEventListener("change", (event) => printing(event.matches));
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width || root.hasAttribute("data-printing")) return;
    width = innerWidth;
    draw();
  });

  /* A page that a server has sent follows it. */
  async function follow() {
    const sign = find("#live");
    let shown = document.body.dataset.live; // the state that this page was made from
    for (;;) {
      await new Promise((wake) => setTimeout(wake, 2000));
      try {
        const now = await (await fetch("/state")).text();
        sign.classList.remove("lost");
        sign.lastElementChild.textContent = "following";
        if (now === shown) continue;
        const fresh = new DOMParser().parseFromString(await (await fetch("/")).text(), "text/html");
        replace(fresh);
        shown = fresh.body.dataset.live;
      } catch {
        sign.classList.add("lost");
        sign.lastElementChild.textContent = "the server has ended";
      }
    }
  }
  function replace(fresh) {
    const [before, after] = [document, fresh].map((page) => page.querySelectorAll(".chart").length);
    if (before !== after) return location.reload();
    for (const part of fresh.querySelectorAll("[data-part]")) {
      const old = document.getElementById(part.id);
      const open = new Map([...old.querySelectorAll("details[id]")].map((each) => [each.id, each.open]));
      const made = document.importNode(part, true);
      for (const each of made.querySelectorAll("details[id]")) each.open = open.get(each.id) ?? each.open;
      old.replaceWith(made);
    }
    data = read(fresh);
    draw();
  }

  draw();
  window.report = { plots, state, zoom };
  if ("live" in document.body.dataset) follow();
})();
