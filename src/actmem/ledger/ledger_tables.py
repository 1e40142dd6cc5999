"""A ledger's and a bill's rows, and how they look: as text, as a table in a notebook, and as one page that needs no server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

UNSAVED = "alive but not saved by autograd"
#: In the order in which tables list them.
STORAGE_KINDS = (
    "activation", "input", "cast weight", "constant", "generator state", UNSAVED, "weight", "gathered weight",
)  # fmt: skip


@dataclass(frozen=True)
class SavedTensor:
    """One stored tensor: what it is and who saved it first.

    module: name of the innermost module that was running; "" for the root.
    op: the torch function, or the autograd Function, that saved it.
    argument: which input of ``op`` the tensor is ("0", "1", …, or a keyword); "" for a tensor
    that ``op`` made itself.
    dtype: a torch.dtype, or its name in a row of a file.
    bytes: this tensor's share of its storage; the shares of one storage add up to its size.
    line: file and line of the call.
    kind: one of ``STORAGE_KINDS``.
    held_by: what keeps it, if autograd doesn't and it could be found out.
    made_by: the operation below autograd that made it; "" if it was there before.
    term: the name that one of this library's layers gave it (``drop.Terms``); "" for others.
    device: the type of the device that holds it.
    """

    module: str
    op: str
    argument: str
    shape: tuple[int, ...]
    dtype: Any
    bytes: int
    line: str
    kind: str = "activation"
    held_by: str = ""
    made_by: str = ""
    term: str = ""
    device: str = "cpu"

    @property
    def name(self) -> str:
        """Module, operation and argument."""
        return f"{self.module or 'root'}: {self.op} {self.argument}".rstrip()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as in a file."""
        return {**vars(self), "shape": list(self.shape), "dtype": str(self.dtype).removeprefix("torch.")}


def rows_of_file(rows: Iterable[dict[str, Any]]) -> list[SavedTensor]:
    """The other way round."""
    return [SavedTensor(**{**row, "shape": tuple(row["shape"])}) for row in rows]


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def fold(rows: Iterable[SavedTensor]) -> list[SavedTensor]:
    """Rows that differ only in the numbers of their module's name as one, with the bytes of all, the largest first.

    Its module has ranges for the numbers, and says how many rows it stands for: ``layers.0-3.norm ×4``.
    """
    groups: dict[tuple, list[SavedTensor]] = {}
    for row in rows:
        pattern = _NUMBER.sub("*", row.module)
        key = (pattern, row.op, row.argument, row.shape, row.dtype, row.bytes, row.kind, row.held_by, row.device)
        groups.setdefault(key, []).append(row)
    folded = [
        replace(
            group[0],
            module=folded_name([row.module or "root" for row in group]) + (f" ×{len(group)}" if len(group) > 1 else ""),
            bytes=sum(row.bytes for row in group),
        )
        for group in groups.values()
    ]
    return sorted(folded, key=lambda row: -row.bytes)


def folded_name(names: list[str]) -> str:
    """Names that differ only in their numbers, as one name: ``layers.0-3.norm``, or ``layers.0,2.norm``."""
    columns = zip(*(map(int, _NUMBER.findall(name)) for name in names))
    ranges = iter([_range(sorted(set(column))) for column in columns])
    return _NUMBER.sub(lambda _: next(ranges), names[0])


def _range(numbers: list[int]) -> str:
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
    shown = ",".join(map(str, numbers[:4]))
    return shown if len(numbers) <= 4 else f"{shown},…{numbers[-1]}"


#: How many lines a ledger shows of itself.
_SHOWN = 30


def readable_size(size: int) -> str:
    """Bytes in a unit that one can read: ``12.3 MiB``."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{size:,} B" if unit == "B" else f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:,.4g} GiB"


def lines_of(rows: Iterable[SavedTensor]) -> list[tuple[str, ...]]:
    """Cells of a table of folded rows, under ``HEADINGS``."""
    return [
        (
            f"{row.bytes:,}",
            row.module,
            f"{row.op} {row.argument}".rstrip(),
            "×".join(map(str, row.shape)) or "scalar",
            str(row.dtype).removeprefix("torch."),
            row.kind + (f", held by {row.held_by}" if row.held_by else ""),
        )
        for row in rows
    ]


HEADINGS = ("bytes", "module", "operation", "shape", "dtype", "kind")


def aligned(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table as text; the first column is flush right."""
    columns = list(zip(headings, *lines)) if lines else [(heading,) for heading in headings]
    widths = [max(map(len, column)) for column in columns]
    text = [
        "  ".join(
            cell.rjust(width) if i == 0 else cell.ljust(width) for i, (cell, width) in enumerate(zip(line, widths))
        )
        for line in (headings, *lines)
    ]
    return "\n".join(line.rstrip() for line in text)


def ledger_text(ledger: Any) -> str:
    """The ledger's total, its kinds, and its largest rows."""
    kinds = ", ".join(f"{kind} {size:,}" for kind, size in ledger.by_kind().items())
    host = f", and {ledger.host_bytes:,} B in the host's memory" if ledger.host_bytes else ""
    head = (
        f"{ledger.total_bytes:,} B ({readable_size(ledger.total_bytes)}) stay for backward{host}: {kinds or 'nothing'}"
    )
    return "\n".join([head, *([rows_text(ledger.tensors)] if ledger.tensors else [])])


def rows_text(rows: Iterable[SavedTensor], most: int = _SHOWN) -> str:
    """A table of the largest rows, folded."""
    folded = fold(rows)
    text = aligned(HEADINGS, lines_of(folded[:most]))
    return text + (f"\n… and {len(folded) - most} smaller rows" if len(folded) > most else "")


def ledger_html(ledger: Any) -> str:
    """The same as an HTML table."""
    folded = fold(ledger.tensors)
    total = f"<p><b>{ledger.total_bytes:,} B</b> ({readable_size(ledger.total_bytes)}) stay for backward</p>"
    table = html_table(HEADINGS, lines_of(folded[:_SHOWN]), ' style="text-align:left;padding:0 .8em 0 0"')
    return total + table + (f"<p>… and {len(folded) - _SHOWN} smaller rows</p>" if len(folded) > _SHOWN else "")


def html_table(headings: Sequence[str], lines: Iterable[Sequence[str]], style: str = "") -> str:
    """A table in HTML; style: an attribute of each cell."""
    head = "".join(f"<th{style}>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td{style}>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def bill_text(bill: Any) -> str:
    """The peak, its kinds, and its largest rows."""
    head = f"peak {bill.peak_bytes:,} B ({readable_size(bill.peak_bytes)}), in {bill.peak_phase}"
    kinds = [(f"{size:,}", kind) for kind, size in bill.by_kind().items()]
    return "\n\n".join([head, aligned(("bytes", "kind"), kinds), rows_text(bill.peak)])


def bill_html(bill: Any) -> str:
    """The same as preformatted text."""
    return f"<pre>{escape(bill_text(bill))}</pre>"


_STYLE = """
:root{color-scheme:light dark;font:15px/1.45 system-ui,sans-serif}body{max-width:72rem;margin:1.5rem auto;padding:0 1rem}
h1{font-size:1.3rem}h2{font-size:1.05rem;margin-top:2rem}svg{width:100%;height:auto;display:block}table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.15rem .6rem;border-bottom:1px solid #8884;font-variant-numeric:tabular-nums}td:first-child,th:first-child{text-align:right}
.scroll{overflow-x:auto}rect{stroke:#fff;cursor:pointer}text{font-size:12px;pointer-events:none;fill:#000}button{font:inherit;margin-right:.3rem}
.axis{font-size:11px;fill:currentColor}.key{margin-right:1rem}.key::before{content:"";display:inline-block;width:.8em;height:.8em;margin-right:.3em;background:var(--colour)}
"""
_SCRIPT = """
const data=JSON.parse(document.getElementById('data').textContent);
const colours={activation:'#8ecae6',input:'#a7c957','cast weight':'#f4a261',constant:'#d8d8d8','generator state':'#cdb4db',weight:'#f2cc8f',
gradient:'#e5989b','main gradient':'#d18589','optimizer state':'#ffd6a5','recomputed activation':'#48bfe3',output:'#b5e48c'};
const unit=n=>{for(const u of ['B','KiB','MiB','GiB']){if(n<1024||u==='GiB')return (u==='B'?n:n.toPrecision(4))+' '+u;n/=1024}};
const el=(n,a,t)=>{const e=document.createElementNS('http://www.w3.org/2000/svg',n);for(const k in a)e.setAttribute(k,a[k]);if(t!==undefined)e.textContent=t;return e};
function tree(rows){const root={name:'model',bytes:0,kids:new Map()};
 for(const r of rows){let at=root;at.bytes+=r.bytes;const path=[...(r.module?r.module.split('.'):[]),r.op+(r.argument?' '+r.argument:'')+' '+r.shape.join('×')+' '+r.dtype];
  for(const p of path){if(!at.kids.has(p))at.kids.set(p,{name:p,bytes:0,kids:new Map(),kind:r.kind,up:at});at=at.kids.get(p);at.bytes+=r.bytes}}return root}
function split(items,x,y,w,h,put){if(!items.length)return;if(items.length===1){put(items[0],x,y,w,h);return}
 const total=items.reduce((s,i)=>s+i.bytes,0);let k=1,sum=items[0].bytes;while(k<items.length-1&&sum+items[k].bytes/2<total/2)sum+=items[k++].bytes;
 const part=sum/total;if(w>=h){split(items.slice(0,k),x,y,w*part,h,put);split(items.slice(k),x+w*part,y,w*(1-part),h,put)}
 else{split(items.slice(0,k),x,y,w,h*part,put);split(items.slice(k),x,y+h*part,w,h*(1-part),put)}}
function map(id,rows){const box=document.getElementById(id),root=tree(rows);let here=root;
 for(let only;here.kids.size===1&&(only=[...here.kids.values()][0]).kids.size;)here=only;
 const draw=()=>{box.replaceChildren();const trail=[];for(let n=here;n;n=n.up)trail.unshift(n);
  for(const n of trail){const b=document.createElement('button');b.textContent=n.name;b.onclick=()=>{here=n;draw()};box.append(b)}
  const p=document.createElement('span');p.textContent=unit(here.bytes)+' ('+here.bytes.toLocaleString('en')+' B)';box.append(p);
  const svg=el('svg',{viewBox:'0 0 1000 420',role:'img','aria-label':'treemap of '+here.name});
  const kids=[...here.kids.values()].sort((a,b)=>b.bytes-a.bytes);
  split(kids,0,0,1000,420,(n,x,y,w,h)=>{const g=el('g',{});const r=el('rect',{x,y,width:w,height:h,fill:colours[n.kind]||'#ccc'});
   r.append(el('title',{},n.name+': '+n.bytes.toLocaleString('en')+' B, '+n.kind));r.onclick=()=>{if(n.kids.size){here=n;draw()}};g.append(r);
   if(w>60&&h>16){const most=Math.floor(w/7);g.append(el('text',{x:x+4,y:y+14},n.name.slice(0,most)));if(h>32)g.append(el('text',{x:x+4,y:y+29},unit(n.bytes)))}
   svg.append(g)});box.append(svg);
  for(const kind of new Set(kids.map(n=>colours[n.kind]?n.kind:'other'))){const key=document.createElement('span');key.className='key';
   key.style.setProperty('--colour',colours[kind]||'#ccc');key.textContent=kind;box.append(key)}};draw()}
function curve(){const box=document.getElementById('curve');if(!box||!data.curve)return;const c=data.curve,most=data.peak_bytes,W=1000,H=240;
 const svg=el('svg',{viewBox:`0 0 ${W} ${H+20+14*data.phases.length}`,role:'img','aria-label':'live bytes after each operation'});
 const taken=[];const at=(i,v)=>[(i/Math.max(1,c.length-1)*W).toFixed(1),(H-v/most*(H-14)).toFixed(1)].join(',');
 const stride=Math.max(1,Math.floor(c.length/2000)),points=[];for(let i=0;i<c.length;i+=stride){let m=i;for(let j=i;j<Math.min(c.length,i+stride);j++)if(c[j]>c[m])m=j;points.push(at(m,c[m]))}
 svg.append(el('polygon',{points:`0,${H} ${points.join(' ')} ${W},${H}`,fill:'#8ecae6',stroke:'#023047'}));
 for(const [name,start] of data.phases){const x=start/Math.max(1,c.length-1)*W;svg.append(el('line',{x1:x,x2:x,y1:0,y2:H,stroke:'#8888'}));
  const wide=8*name.length,left=Math.min(x+3,W-wide);let line=taken.findIndex(end=>left>end);if(line<0)line=taken.length;taken[line]=left+wide;
  svg.append(el('text',{x:left,y:H+14+14*line,class:'axis'},name))}
 const peak=c.indexOf(most);svg.append(el('text',{x:Math.min(W-190,peak/Math.max(1,c.length-1)*W+4),y:11,class:'axis'},'peak '+unit(most)+', operation '+peak));box.append(svg)}
map('map',data.rows);if(data.peak)map('bill',data.peak);curve();
"""


def page(result: dict[str, Any]) -> str:
    """``result`` of ``record_command.as_dict`` as one HTML page."""
    data = json.dumps(result).replace("<", "\\u003c")
    parts = [
        f"<h1>{escape(result.get('target', 'model'))}: {result['total_bytes']:,} bytes stay for backward</h1>",
        *(f"<p>{escape(note)}</p>" for note in result.get("notes", ())),
        '<h2>By module: click to look inside</h2><div id="map"></div>',
    ]
    if result.get("findings"):
        lines = [[f"{f['bytes']:,}", f["waste"], f["text"]] for f in result["findings"]]
        parts += ["<h2>What could go</h2>", _wide(("bytes", "waste", "change"), lines)]
    parts += ["<h2>Rows</h2>", _rows(result["rows"])]
    if "peak" in result:
        parts.append(f"<h2>One step: {result['peak_bytes']:,} bytes at the peak</h2>")
        parts += ['<div id="curve"></div><div id="bill"></div>', _rows(result["peak"])]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>What stays for backward</title><style>{_STYLE}</style></head><body>{''.join(parts)}"
        f'<script type="application/json" id="data">{data}</script><script>{_SCRIPT}</script></body></html>'
    )


def _rows(rows: Iterable[dict[str, Any]]) -> str:
    folded = fold(rows_of_file(rows))
    return _wide((*HEADINGS, "line"), [(*cells, row.line) for row, cells in zip(folded, lines_of(folded))])


def _wide(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return f'<div class="scroll">{html_table(headings, lines)}</div>'
